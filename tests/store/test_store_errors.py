import subprocess
import sys

import pytest

from mmqk.store import cli_main


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
        [sys.executable, "-c", f"import time; time.sleep(0.3)\n{code}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 141
