"""FX graph passes, one file each; installed as `ple_compile.passes`."""
