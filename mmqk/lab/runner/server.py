"""The fork server imports this module first.

Signals to the process group of a terminal do not reach the server, and it reads the commit before it imports the
training code: runs execute the code imported here, even if the files change later.
"""

import os

from mmqk.store import code_version

os.setsid()
code_version()
