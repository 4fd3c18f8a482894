"""How the ranks of a run start, agree, prove and end.

    entry.py       what a script does before any other import
    startup.py     from settings to a process group, and from an error to an exit code
    agreement.py   how ranks agree: stages, deadlines, values
    board.py       what ranks write for each other, and the watchdog that ends a rank, and knows whom to blame
    failures.py    what went wrong, in words and codes
    proof.py       what must be proven before a long run may go on
    drill.py       the whole cycle once, before the long run

The invariant: no rank decides alone, and none is left behind: a rank that fails or hangs ends all of them within its
deadline, and the last word names it. (The face names modules, and imports none: entry must run on any Python, the rest
before torch is there.)
"""

__all__ = ["agreement", "drill", "entry", "proof", "startup"]
