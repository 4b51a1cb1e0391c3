from __future__ import annotations

import os
import signal
import threading

import pytest

from megazero.train.guards.concerns import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_becomes_a_flag(number):
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.reason == number.name


def test_the_first_signal_is_the_reason():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == "SIGUSR1"


def test_handlers_are_restored_even_after_an_error():
    def mine(number, frame):
        raise AssertionError("never sent")

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        with pytest.raises(RuntimeError), StopRequest():
            raise RuntimeError
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ctrl_c_stays_an_interrupt():
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)


def test_in_another_thread_nothing_is_installed():
    handlers, requested = [], []

    def body():
        with StopRequest() as stop:
            handlers.append(signal.getsignal(signal.SIGTERM))
            requested.append(stop.requested)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]
    assert requested == [False]
