"""report.md shows all user text as plain text: no character of a label, a claim or a folder name is read as
markup."""

import re

import pytest

from mmqk.lab.formatting import Raw, code, fenced, markdown
from mmqk.lab.page.page import write_report
from tests.lab.fake_runs import DEMO, write_demo, write_run

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
        grid["claims"][0]["finding"] = {"reproduced": f"{first} {words}"}
        grid["title"] = words
        grid["report"] |= {"command": command, "cannot_tell": [words, f"{first} {words}"]}

    return change


CHANGES = {
    "tame": worded("plain words", "V", "first", "make"),
    "hostile": worded(HOSTILE, f"V]({EVIL})", "1. #", f"make\n```\n# planted heading\n[y]({EVIL})"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory, module_without_figures):
    """Return report.md of two copies of the runs: with plain words and with hostile words in every text field."""
    root = tmp_path_factory.mktemp("pages")
    found = {}
    for name, change in CHANGES.items():
        write_report(write_demo(root / name, change=change), root / f"{name}-report")
        found[name] = (root / f"{name}-report" / "report.md").read_text()
    return found


def unescaped(text, pattern):
    """Return the matches outside code that are not escaped by a backslash."""
    plain = re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", text)
    plain = re.sub(r"(?<!\\)(`+)(?!`).*?[^`]\1(?!`)", "", plain)
    return [m[1] for m in re.finditer(rf"(?<!\\)(?:\\\\)*({pattern})", plain)]


def test_no_text_of_a_user_is_a_link_an_image_or_html(pages):
    for name, page in pages.items():
        links = unescaped(page, r"\]\([^)]*\)")
        assert links and all(link.startswith("](figures/") for link in links), name
        assert set(unescaped(page, "<[^>]*>")) <= {"<br>"}, name
        assert not unescaped(page, r"\$") and not unescaped(page, "&") and not unescaped(page, "~"), name
    assert EVIL in pages["hostile"]
    # The control: `unescaped` finds links, and only those that are not escaped.
    assert unescaped("a [b](c) \\[d\\](e) \\\\[f](g)", r"\]\([^)]*\)") == ["](c)", "](g)"]


def test_no_text_of_a_user_begins_a_line_or_ends_one(pages):
    tame, spoiled = (re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", page) for page in pages.values())
    for mark in ("#", "-", "1.", "|", "[", "!", "```"):
        count = [sum(line.startswith(mark) for line in page.splitlines()) for page in (tame, spoiled)]
        assert count[0] == count[1], mark
    for one, other in zip(*(rows(page) for page in (tame, spoiled)), strict=True):
        assert one == other


def rows(page):
    """Return the number of cells of each table row."""
    return [len(unescaped(line, r"\|")) for line in page.splitlines() if line.startswith("|")]


def test_a_parser_sees_the_marks_of_the_page_alone(pages):
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    kinds = {}
    for name, page in pages.items():
        tokens = [t for token in parser.parse(page) for t in (token, *(token.children or ()))]
        targets = [
            t.attrs.get("href") or t.attrs.get("src") for t in tokens if t.type in ("link_open", "image")
        ]
        assert targets and all(target.startswith("figures/") for target in targets)
        assert {t.content for t in tokens if t.type.startswith("html")} <= {"<br>"}
        assert not [t for t in tokens if t.type == "s_open"]
        kinds[name] = [
            t.type for t in tokens if t.type in ("heading_open", "list_item_open", "td_open", "fence")
        ]
        said = "".join(t.content for t in tokens if t.type in ("text", "code_inline"))
    assert kinds["tame"] == kinds["hostile"]
    assert (
        f"x]({EVIL}) [y]({EVIL}) ![z]({EVIL}/p.png) <img src={EVIL}> `c` **b** _i_ | cell | $\\m$ &lt; ~~s~~"
        in said
    )


def test_names_of_folders_stay_in_their_code_span(tmp_path):
    name = "a`|](evil) `b"
    write_run(tmp_path / "runs" / name / "seed0", DEMO["mixed"])
    write_report(tmp_path / "runs", tmp_path / "report")
    page = (tmp_path / "report/report.md").read_text()
    assert "| `` a`\\|](evil) `b/seed0 `` |" in page
    assert all(link.startswith("](figures/") for link in unescaped(page, r"\]\([^)]*\)"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, as in 0.46 (0.3 to 0.6)", "plain, as in 0.46 (0.3 to 0.6)"),
        ("+0.46 nats", "+0.46 nats"),
        ("-0.04 to 0.1", "-0.04 to 0.1"),
        ("5.12", "5.12"),
        (", ", ", "),
        ("    ", "    "),
        ("    indented", " indented"),
        ("- item", r"\- item"),
        ("12. item", r"12\. item"),
        ("## head", r"\## head"),
        ("--- ", r"\--- "),
        ("a\r\n\n# b\u2028c", "a  # b c"),
        ("![a](b)", r"!\[a\](b)"),
        (Raw("**a**"), "**a**"),
        (7, "7"),
    ],
)
def test_text_is_escaped_where_it_would_be_a_mark_and_nowhere_else(text, shown):
    assert markdown(text) == shown


def test_code_is_fenced_by_more_than_it_holds():
    assert code("a/b") == "`a/b`" and code("a``b") == "``` a``b ```" and code("a|b\nc") == "`a\\|b c`"
    assert fenced("a\nb") == "```\na\nb\n```" and fenced("````").splitlines()[0] == "`````"
