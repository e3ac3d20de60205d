from examples import host_table


def test_says_that_it_needs_a_gpu_and_shows_the_eager_path(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    host_table.main(["--tokens", "5"])
    output = capsys.readouterr().out
    assert "need one" in output and "logits of 5 tokens: (1, 5, 96)" in output
