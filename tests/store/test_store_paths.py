"""Pages print paths relative to the repository or the working directory."""

from pathlib import Path

import pytest

from mmqk.store import relative_word, without_roots


@pytest.mark.parametrize(
    "text",
    [
        "runs/demo", "../up/x.yaml", "./here/x", "~/mine/x", "q_norm/text/layer03", "1/2/3", "tokens/s, nats/token",
        "https://example.org/a/b", "<p>a</p><b>c</b>", "text / image / audio", "--data.mix={\"pair\": 1}", "[a](/b)",
        "<svg><path d='M0 0'/>/home/me/x</svg>", "data:image/png;base64,/9j/4AAQ/x",
    ],
)  # fmt: skip
def test_what_is_no_absolute_path_stays(text):
    assert without_roots(text) == text
    if "=" in text or Path(text).parts == ("runs", "demo"):
        assert relative_word(text) == text


def test_texts_of_plain_data_lose_their_roots():
    said = "OSError: [Errno 28] No space left: '/home/me/runs/a/b.ckpt', see /home/me/log.txt"
    assert without_roots({"a": [said, ("x", 1)]}) == {
        "a": ["OSError: [Errno 28] No space left: 'runs/a/b.ckpt', see log.txt", ("x", 1)]
    }
