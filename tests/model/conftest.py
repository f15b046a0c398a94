"""Runs the tests of the model with one thread: they are so small that several threads would take longer."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Use one thread while the tests of a module run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
