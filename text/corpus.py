"""Text that every Python with torch carries: the quickstart's corpus, packed once into a cache folder.

    code        the standard library's modules, without tests
    general     Python's help topics; the documentation inside torch, numpy and networkx
    math        the documentation inside sympy, with its worked examples (sympy and networkx come with torch)
    reasoning   worked steps of arithmetic and logic, generated from a seed: synthetic

Bytes, 257 ids. The text differs between versions of Python and of these packages, so no figure may be pinned to it.
"""

import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import platform
import random
import re
import shutil
import sysconfig
import tempfile
import time

from . import pack
from .shards import DataError, os_reason, read_header
from .source import agreed

CORPUS_VERSION = 1  # raise it when the recipe changes
PACKAGES = ("torch", "numpy", "networkx", "sympy")
DOCSTRING = re.compile(r'(?<![\w\'"])[rR]?"""(.+?)"""', re.DOTALL)
REASONING_BYTES = 4_000_000
LEFT_OUT = {
    "test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings",
    "lib2to3", "_inductor", "_dynamo", "benchmarks",
}  # fmt: skip


def python_corpus(cache: str, agree, log=print) -> str:
    """The folder of the packed corpus. One process of each machine packs it, where it is not there whole."""
    versions = [platform.python_version()]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} absent")
    key = hashlib.sha256(json.dumps([CORPUS_VERSION, versions]).encode()).hexdigest()[:12]
    folder = os.path.join(cache, f"python-{key}")

    def make_once():
        try:
            if getattr(agree, "local_rank", agree.rank) == 0 and not whole(folder):
                make(folder, log)
        except OSError as e:
            reason = "cannot be made" if isinstance(e, (FileNotFoundError, PermissionError)) else os_reason(e)
            raise DataError(
                f"cache_dir {cache}: {reason}; --cache_dir=FOLDER takes one that this user can write"
            ) from None

    agreed(agree, "packing the Python corpus", make_once)
    return folder


def whole(folder: str) -> bool:
    """Is the corpus there, with no shard lost or cut short?"""
    try:
        with open(f"{folder}/metadata.json", encoding="utf-8") as f:
            domains = json.load(f)["domains"]
        for domain, about in domains.items():
            paths = glob.glob(f"{glob.escape(folder)}/data/{domain}/*.npy")
            tokens = sum(math.prod(read_header(path, path)[0]) for path in paths)
            if tokens != about["tokens"] + about["val_tokens"]:
                return False
    except (OSError, ValueError, KeyError, TypeError):  # ValueError: DataError, too
        return False
    return True


def make(folder: str, log):
    start = time.monotonic()
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    for left in glob.glob(f"{glob.escape(folder)}.*.tmp"):  # of a process that was killed
        if time.time() - os.stat(left).st_mtime > 3600:
            shutil.rmtree(left, ignore_errors=True)
    work = tempfile.mkdtemp(prefix=f"{folder}.", suffix=".tmp")  # another machine may share the cache folder
    os.chmod(work, 0o755)
    try:
        domains, total = {}, 0
        meta, encode = pack.load_tokenizer("bytes", None)
        for domain, texts in RECIPE.items():
            unique = list(dict.fromkeys(t.strip() for t in texts()))
            documents = pack.Documents([t.encode("utf-8", errors="replace") for t in unique])
            trained, held_out = documents.split(0.02, 0, domain)
            with pack.replacing(work, domain, "python", 257, pack.SHARD_TOKENS) as (train, val, about):
                about["documents"] = len(documents.table)
                pack.pack_text(documents, held_out, val, encode, 256)
                pack.pack_text(documents, trained, train, encode, 256)
            domains[domain] = about
            total += domains[domain]["tokens"]
        domains["reasoning"]["source"] = "generated worked steps: synthetic"
        meta |= {"python": platform.python_version(), "domains": domains}
        pack.save_json(os.path.join(work, "metadata.json"), meta)
        try:
            os.rename(work, folder)
        except OSError:  # it is there: another process was quicker with the same text, or it is incomplete
            if not whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log(
        f"data: packed {total / 1e6:.1f} MB of Python's own text into {folder} in {time.monotonic() - start:.1f} s"
    )


def python_files(top: str):
    """Source files below a folder, in a fixed order."""
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(f for f in folders if f not in LEFT_OUT)
        for name in sorted(n for n in names if n.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as f:
                yield f.read().decode("utf-8", errors="replace").replace("\0", "")


def docstrings(package: str) -> list[str]:
    """The documentation inside a package: its triple-quoted texts that hold at least a sentence."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    found = []
    for source in python_files(spec.submodule_search_locations[0]):
        found += [inspect.cleandoc(t) for t in DOCSTRING.findall(source) if len(t) > 300 and ". " in t]
    return found


def general() -> list[str]:
    from pydoc_data.topics import topics

    written = [docstrings(package) for package in ("torch", "numpy", "networkx")]
    return [topics[k] for k in sorted(topics)] + sum(written, [])


# --- generated worked steps --------------------------------------------------------------------------------------


def addition(r) -> str:
    a, b = r.randrange(10, 10_000), r.randrange(10, 10_000)
    lines, carry, digits = [f"Question: What is {a} + {b}?"], 0, max(len(str(a)), len(str(b)))
    for i in range(digits):
        x, y = a // 10**i % 10, b // 10**i % 10
        s = x + y + carry
        plus = f" + {carry} carried" if carry else ""
        lines.append(f"{x} + {y}{plus} = {s}: write {s % 10}" + (f", carry {s // 10}." if s > 9 else "."))
        carry = s // 10
    return "\n".join(lines) + f"\nAnswer: {a + b}"


def multiplication(r) -> str:
    a, b = r.randrange(11, 1000), r.randrange(11, 100)
    tens, ones = b // 10 * 10, b % 10
    return (
        f"Question: What is {a} * {b}?\n{b} = {tens} + {ones}.\n{a} * {tens} = {a * tens}.\n{a} * {ones} = {a * ones}.\n"
        f"{a * tens} + {a * ones} = {a * b}.\nAnswer: {a * b}"
    )


def division(r) -> str:
    a, b = r.randrange(100, 10_000), r.randrange(2, 13)
    lines, rest, out = [f"Question: Divide {a} by {b}. Give quotient and remainder."], 0, ""
    for digit in str(a):
        value = rest * 10 + int(digit)
        lines.append(f"Bring down {digit}: {value} / {b} = {value // b}, remainder {value % b}.")
        rest, out = value % b, out + str(value // b)
    return "\n".join(lines) + f"\nAnswer: {int(out)} remainder {rest}"


def euclid(r) -> str:
    g = r.randrange(1, 30)
    a, b = g * r.randrange(2, 60), g * r.randrange(2, 60)
    lines, x, y = [f"Question: What is the greatest common divisor of {a} and {b}?"], a, b
    while y:
        lines.append(f"{x} = {x // y} * {y} + {x % y}.")
        x, y = y, x % y
    return "\n".join(lines) + f"\nThe last remainder that is not 0 is {x}.\nAnswer: {x}"


def equation(r) -> str:
    a, x, b = r.randrange(2, 20), r.randrange(-30, 31), r.randrange(1, 100)
    c = a * x + b
    return (
        f"Question: Solve {a}x + {b} = {c} for x.\nSubtract {b} from both sides: {a}x = {c - b}.\n"
        f"Divide both sides by {a}: x = {x}.\nCheck: {a} * {x} + {b} = {c}.\nAnswer: {x}"
    )


def sequence(r) -> str:
    start, step, n = r.randrange(1, 50), r.randrange(2, 15), r.randrange(4, 7)
    if r.random() < 0.5:
        terms = [start + step * i for i in range(n + 1)]
        rule = f"Each term is the one before plus {step}"
    else:
        step = step % 3 + 2
        terms = [start * step**i for i in range(n + 1)]
        rule = f"Each term is the one before times {step}"
    shown = ", ".join(map(str, terms[:-1]))
    return f"Question: How does {shown} go on?\n{rule}.\nAfter {terms[-2]} comes {terms[-1]}.\nAnswer: {terms[-1]}"


NAMES = "Ada Ben Carla David Emma Felix Grace Hugo Ida Jonas Klara Leo Mira Nils Olga Paul Rosa Sam Tara Uwe".split()


def ranking(r) -> str:
    people = r.sample(NAMES, r.randrange(3, 6))
    word, best = r.choice([("taller", "tallest"), ("older", "oldest"), ("faster", "fastest")])
    facts = [f"{a} is {word} than {b}." for a, b in zip(people, people[1:], strict=False)]
    shuffled = r.sample(facts, len(facts))
    lines = [f"Question: {' '.join(shuffled)} Who is the {best}?", f"Start: {facts[0]}"]
    lines += [f"Then: {f}" for f in facts[1:]]
    lines.append(f"So the order is {', '.join(people)}.")
    return "\n".join(lines) + f"\nAnswer: {people[0]}"


def syllogism(r) -> str:
    a, b, c = r.sample("blickets florps wugs daxes zibs mips toves borogoves raths gleebs".split(), 3)
    name, yes = r.choice(NAMES), r.random() < 0.5
    rule = f"All {b} are {c}" if yes else f"No {b} are {c}"
    return (
        f"Question: All {a} are {b}. {rule}. {name} has one of the {a}. Is it one of the {c}?\n"
        f"It is one of the {a}, and all {a} are {b}: so it is one of the {b}.\n"
        f"{rule}: so it is {'' if yes else 'not '}one of the {c}.\nAnswer: {'yes' if yes else 'no'}"
    )


def shopping(r) -> str:
    name, thing = r.choice(NAMES), r.choice("apples pens books cups stamps lamps eggs ropes".split())
    n, price, extra = r.randrange(2, 20), r.randrange(2, 30), r.randrange(1, 50)
    paid = n * price + extra
    return (
        f"Question: {name} buys {n} {thing} at {price} coins each and pays with {paid} coins. What is the change?\n"
        f"{n} {thing} cost {n} * {price} = {n * price} coins.\n{paid} - {n * price} = {extra}.\nAnswer: {extra} coins"
    )


def binary(r) -> str:
    n = value = r.randrange(5, 256)
    lines, bits = [f"Question: Write {n} in binary."], ""
    while value:
        lines.append(f"{value} = 2 * {value // 2} + {value % 2}.")
        bits, value = str(value % 2) + bits, value // 2
    return "\n".join(lines) + f"\nRead the remainders from the last to the first.\nAnswer: {bits}"


KINDS = (addition, multiplication, division, euclid, equation, sequence, ranking, syllogism, shopping, binary)


def reasoning() -> list[str]:
    r, texts, size = random.Random(0), [], 0
    while size < REASONING_BYTES:
        texts.append(KINDS[len(texts) % len(KINDS)](r))
        size += len(texts[-1]) + 1
    return texts


RECIPE = {
    "code": lambda: python_files(sysconfig.get_paths()["stdlib"]),
    "general": general,
    "math": lambda: docstrings("sympy"),
    "reasoning": reasoning,
}
