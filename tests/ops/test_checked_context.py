import pytest
import torch

from ple_compile.ops.checked_context import check_context, checked_context


def test_placeholders_are_named():
    context = torch.tensor([[5, 3], [7, -1], [-1, 2]])
    with pytest.raises(ValueError, match=r"ngram_context\[1, 1\] is -1, which is no token"):
        checked_context(context)
    with pytest.raises(ValueError, match=r"ngram_context\[1, 0\] is 7"):
        check_context(context.clamp(min=0), vocab_size=7)


def test_tokens_pass():
    context = torch.tensor([[5, 3], [7, 0]])
    check_context(context, vocab_size=8)
    assert torch.equal(checked_context(context), context)
    torch.library.opcheck(checked_context, (context,))
