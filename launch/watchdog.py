"""The thread of every rank that sees to it that all end when one fails, even while its main thread hangs in C++.

Who is blamed:

* a rank that raises, or that passes its deadline outside a collective, names itself;
* a killed process is named by the ranks of its machine, a silent one by its neighbour in the ring of heartbeats;
* a rank inside a collective is a victim and speaks last; then nobody is named, rather than somebody innocent.

Reference: NVIDIA's nvidia-resiliency-ext (section deadlines).
"""

import faulthandler
import signal
import socket
import sys
import threading
import time

from .board import NEIGHBOURS, POLL, Board, process_state, process_table, whereabouts
from .failures import NOBODY, first_line

GRACE = 2.0  # seconds for the main thread to leave by itself once a failure is known
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """SIGTERM, SIGINT and SIGUSR1 only set a flag, which the ranks agree on. A second SIGINT leaves at once: python runs
    no handler while the main thread waits inside a collective, so the watchdog counts them on the wake-up pipe."""

    def __init__(self, says: bool = True):
        self.name, self.when, self.interrupts, self.says = None, 0.0, 0, says
        self.pipe, end = socket.socketpair()
        self.pipe.setblocking(False)
        end.setblocking(False)
        signal.set_wakeup_fd(end.detach(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number, frame=None):
        if self.name is None:
            self.name, self.when = signal.Signals(number).name, time.monotonic()
            if self.says:  # a step and its save can take a minute: nobody should wonder, or insist
                again = "; a second Ctrl-C ends it at once" if number == signal.SIGINT else ""
                text = f"[nova] {self.name}: stops after this step or stage, nothing is lost{again}"
                print(text, file=sys.stderr, flush=True)

    def insisted(self) -> bool:
        """Has SIGINT come twice? Called by the watchdog."""
        try:
            for number in self.pipe.recv(64):
                self.interrupts += number == signal.SIGINT
                if number in SIGNALS:
                    self._note(number)
        except BlockingIOError:
            pass
        return self.interrupts > 1


class Watchdog:
    """Looks at the board, at this rank's deadline and at its neighbours; `leave(failure)` ends the process."""

    def __init__(self, board: Board, signals: StopSignals, leave):
        self.board, self.signals, self.leave = board, signals, leave
        self.closed, self.pulse = threading.Event(), time.monotonic()
        self.table, self.peers = process_table(), {}  # {rank: its card}, of this machine's other ranks
        self.heard = (None, time.monotonic())  # the neighbour's last beat, and when it came
        self.threads = [
            threading.Thread(target=f, daemon=True) for f in (self._watch, self._watch_the_watchdog)
        ]

    def start(self):
        for thread in self.threads:
            thread.start()

    def stop(self):
        """Both threads are gone: inside the store while Python ends, one would abort the process."""
        self.closed.set()
        for thread in self.threads:
            thread.join(5)

    def _watch(self):
        import torch.distributed as dist

        beaten = 0.0
        while not self.closed.wait(POLL):
            now = time.monotonic()
            try:
                if self.signals.insisted():
                    self.blame("second SIGINT: ended at once, unsaved", code=130, reason="SIGINT")
                if self.board.known():
                    time.sleep(GRACE)
                    self.leave(self.board.failure)
                self.check_deadline(now)
                self.check_processes()
                if now - beaten > 1:
                    beaten = now
                    self.check_neighbour(now)
                self.pulse = time.monotonic()
            except (dist.DistNetworkError, dist.DistStoreError) as e:
                if not self.closed.is_set():
                    self.leave(self.board.store_lost(f"lost ({first_line(e)})"))
                return

    def blame(self, why: str, **more):
        self.leave(self.board.record(why, **more))

    def check_deadline(self, now: float):
        """Is the main thread late with what it does? A victim lets the culprit, or its neighbour, speak first."""
        until = self.board.task[1]
        if until is None or now < until:
            return
        waits, where = whereabouts(self.board.gpu)
        if waits and now < until + self.board.lost + NEIGHBOURS:
            return
        faulthandler.dump_traceback(all_threads=True)
        why = "still waiting for other ranks after the deadline" if waits else "deadline passed"
        self.blame(f"{why}, at {where}", rank=NOBODY if waits else None)

    def check_processes(self):
        """A rank of this machine whose process is gone without a bye was killed: no need to wait for its heartbeat."""
        launcher = self.board.launcher
        first = launcher.rank - launcher.local_rank
        for rank in range(first, first + launcher.local_world):
            if rank == launcher.rank:
                continue
            card = self.peers.get(rank) or self.board.card(rank)
            if card is None:
                continue
            self.peers[rank] = card
            if self.table is None or card["table"] != self.table:
                continue
            state = process_state(card["pid"])
            gone = state is None or state[0] in "ZX" or state[1] != card["state"][1]
            if (
                gone and not self.board.store.check([f"bye/{rank}"]) and not self.board.known()
            ):  # its last word counts
                self.blame(f"process {card['pid']} of rank {rank} is gone", rank=rank)

    def check_neighbour(self, now: float):
        """Send a heartbeat, and listen for that of the next rank in the ring."""
        store, neighbour = self.board.store, (self.board.rank + 1) % self.board.world
        store.add(f"beat/{self.board.rank}", 1)
        beat = store.get(f"beat/{neighbour}") if store.check([f"beat/{neighbour}"]) else None
        if beat is None or beat != self.heard[0]:
            self.heard = (beat, now)
        elif now - self.heard[1] > self.board.lost and not store.check([f"bye/{neighbour}"]):
            self.blame(f"rank {neighbour} sent no heartbeat for {now - self.heard[1]:.0f} s", rank=neighbour)

    def _watch_the_watchdog(self):
        """A store whose host vanished without closing the connection blocks the watchdog itself."""
        last = time.monotonic()
        while not self.closed.wait(1):
            now = time.monotonic()
            if now - last > 4:  # it was this process that stood still: count again from here
                self.pulse = now
            last = now
            if now - self.pulse > self.board.lost + GRACE:
                self.leave(self.board.store_lost(f"silent for {now - self.pulse:.0f} s"))
