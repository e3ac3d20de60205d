"""The fused operators of the `ple::` namespace, one file each."""
