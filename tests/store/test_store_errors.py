import subprocess
import sys

import pytest

from mmqk.store import UserError, cli_main


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("\0", "\\x00"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\u202e", "\\u202e"),
        ("\udc80", "\\udc80"),
        ("é \n\t 雪", "é 雪"),
        ("x" * 9000, "xxx … xxx"),
    ],
)
def test_a_message_is_one_line_of_printable_characters(capsys, value, shown):
    @cli_main
    def main(argv):
        raise UserError(f"a.json: lr is {value}: give a number")

    assert main([]) == 2
    said = capsys.readouterr().err
    assert shown in said and said.startswith("mmqk: a.json: lr is ") and said.endswith(": give a number\n")
    assert said[:-1].isprintable() and len(said) < 4000


def test_a_defect_of_ours_keeps_its_traceback():
    @cli_main
    def main(argv):
        raise KeyError("ours")

    with pytest.raises(KeyError):
        main([])


def test_exit_codes_pass_and_ctrl_c_is_130():
    def interrupted(argv):
        raise KeyboardInterrupt

    assert cli_main(lambda argv: 3)([]) == 3
    assert cli_main(interrupted)([]) == 130


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_goes_away_leaves_no_traceback(lines):
    code = (
        "from mmqk.store import run_main\n"
        "def main(argv):\n"
        f"    print('line\\n' * {lines})\n"
        "    return 0\n"
        "run_main(main)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"import time; time.sleep(0.3)\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141
