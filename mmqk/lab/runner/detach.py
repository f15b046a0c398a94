"""The fork server imports this module first: signals to the process group of a terminal do not reach the server."""

import os

os.setsid()
