"""report.md shows all user text as plain text: no character of a label, a claim or a folder name is read as
markup."""

import re

import pytest
from markdown_it import MarkdownIt

from mmqk.lab.page import write_report
from tests.lab.fake_runs import write_demo

EVIL = "http://evil.example"
HOSTILE = (
    f"x]({EVIL}) [y]({EVIL}) ![z]({EVIL}/p.png) <img src={EVIL}> `c` **b** _i_ | cell | $\\m$ &lt; ~~s~~ \\"
    f"\n\n# planted heading\n- planted item\n1. planted number\n```\n\n[V]: {EVIL}\n| a | b |\n| --- | --- |\n"
)


def worded(words, mark, first, command):
    """Return a function that puts these words into every text field of a grid."""

    def change(grid):
        for arm in grid["arms"].values():
            arm["label"] = f"{words} {arm['label']}"
        keys = ("statement", "source", "reference_value", "note", "would_contradict", "estimand")
        for claim in grid["claims"]:
            claim |= dict.fromkeys(keys, words) | {"source_access": mark}
        grid["title"] = words
        grid["report"] |= {"command": command, "cannot_tell": [words, f"{first} {words}"]}

    return change


CHANGES = {
    "tame": worded("plain words", "V", "first", "make"),
    "hostile": worded(HOSTILE, f"V]({EVIL})", "1. #", f"make\n```\n# planted heading\n[y]({EVIL})"),
}


def parsed(page):
    """Return the tokens of a page, with those inside of them, of a parser of GitHub's Markdown."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return [t for token in parser.parse(page) for t in (token, *(token.children or ()))]


def targets_of(tokens):
    return [t.attrs.get("href") or t.attrs.get("src") for t in tokens if t.type in ("link_open", "image")]


@pytest.mark.usefixtures("without_figures")
def test_a_parser_sees_the_marks_of_the_page_alone(tmp_path):
    kinds = {}
    for name, change in CHANGES.items():
        write_report(write_demo(tmp_path / name, change=change), tmp_path / f"{name}-report")
        page = (tmp_path / f"{name}-report/report.md").read_text()
        tokens = parsed(page)
        targets = targets_of(tokens)
        assert targets and all(target.startswith("figures/") for target in targets)
        assert {t.content for t in tokens if t.type.startswith("html")} <= {"<br>"}
        assert not [t for t in tokens if t.type == "s_open"]
        # No user text begins or ends a line, a cell or a block.
        kinds[name] = [t.type for t in tokens if t.type in ("heading_open", "list_item_open", "td_open", "fence")]
        said = "".join(t.content for t in tokens if t.type in ("text", "code_inline"))
    assert kinds["tame"] == kinds["hostile"]
    assert len([t for t in tokens if t.type == "table_open"]) == page.count("\n| ---") + page.count("\n| --:")
    links = f"x]({EVIL}) [y]({EVIL}) ![z]({EVIL}/p.png) <img src={EVIL}>"
    assert f"{links} `c` **b** _i_ | cell | $\\m$ &lt; ~~s~~" in said
    # The control: the parser finds a link that is not escaped.
    assert targets_of(parsed("a [b](c) \\[d\\](e)")) == ["c"]
    # GitHub reads a dollar as mathematics, the parser does not.
    assert not re.findall(r"(?<!\\)\$", prose(page))


def prose(page):
    """Return the page without code."""
    return re.sub(r"(?<!\\)(`+)(?!`).*?[^`]\1(?!`)", "", re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", page))
