"""The Hugging Face Hub, patiently: reading a dataset repo, publishing to a model repo.

    client.py      huggingface_hub with one retry policy
    source.py      HubSource: shards of a dataset repo, each at the commit that brought it
    cache.py       the bounded folder that they are kept in
    publisher.py   Publisher: folders to a model repo, verified there

The invariant: nothing that came from or went to the Hub counts before its content was compared; whatever is waited for is
bounded and logged, and what trying again cannot heal ends at once, with a sentence on what to do.
"""

from .client import HubError
from .publisher import Publisher
from .source import HubSource

__all__ = ["HubError", "HubSource", "Publisher"]
