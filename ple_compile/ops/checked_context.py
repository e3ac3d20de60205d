"""The context tokens of packed requests, after a look at each of them on the host.

Every id in `ngram_context` is hashed, negative ones like any other, so a server's placeholder (-1 for a draft that is
not decided yet, say) gives the rows of another n-gram without a sign of it. Keeping placeholders out is the caller's
duty; `Config.debug` puts this op in front of the ids. It waits for the device and cannot be captured in a CUDA graph.
"""

from torch import Tensor

from ple_compile.ops._library import define


def check_context(context: Tensor, vocab_size: int | None = None) -> None:
    """Raise a ValueError that names the first id of `context` [R, N - 1] that is no token of the vocabulary."""
    wrong = context < 0
    if vocab_size is not None:
        wrong = wrong | (context >= vocab_size)
    if wrong.any():
        request, column = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"ngram_context[{request}, {column}] is {int(context[request, column])}, which is no token: "
            "it would be hashed like one; pass the last accepted tokens, with EOS before the start"
        )


def reference(context: Tensor) -> Tensor:
    check_context(context)
    return context.clone()


def fake(context: Tensor) -> Tensor:
    return context.clone()


checked_context = define(
    "checked_context(Tensor context) -> Tensor", cpu=reference, cuda=reference, fake=fake, on_host=True
)
