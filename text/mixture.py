"""Which domains a run reads, and how often: exact weights over every window of one cycle."""

import math
import re

from .shards import DataError

MAX_CYCLE = 100_000  # sum of the domain weights: the length of the pattern that is repeated


def check_domains(domains: list) -> list[str]:
    if not domains:
        raise DataError("domains is empty: name at least one folder under data/")
    for d in domains:
        if not isinstance(d, str) or not re.fullmatch(r"[\w-][\w. -]*", d) or d != d.strip():
            raise DataError(f"domains: {d!r} is not the name of a folder under data/")
    if len(set(domains)) != len(domains):
        raise DataError(
            f"domains: {', '.join(domains)}: one is named twice; set domain_weights to read it more often"
        )
    return list(domains)


def mixture(settings) -> tuple[list[str], list[int], list[int]]:
    """(domains, weights without a common divisor, pattern): the domains' numbers in turn, weights[d] times each per
    sum(weights), spread evenly (smooth weighted round robin)."""
    domains = check_domains(settings.domains)
    weights = settings.domain_weights or [1] * len(domains)
    if len(weights) != len(domains) or any(type(w) is not int or w < 1 for w in weights):
        raise DataError(
            f"domain_weights={weights}: give one positive integer for each of {', '.join(domains)}"
        )
    weights = [w // math.gcd(*weights) for w in weights]
    total = sum(weights)
    if total > MAX_CYCLE:
        raise DataError(f"domain_weights={weights}: their sum must not exceed {MAX_CYCLE:,}: round them")
    pattern, credit = [], [0] * len(weights)
    for _ in range(total):
        credit = [c + w for c, w in zip(credit, weights, strict=True)]
        d = max(range(len(weights)), key=credit.__getitem__)
        credit[d] -= total
        pattern.append(d)
    return domains, weights, pattern
