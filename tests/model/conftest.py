"""The tests of the model are many and tiny: several threads would wait longer than they compute."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """One thread while a module's tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
