"""Drafters: where draft tokens come from. All follow one protocol, ``base.Drafter``."""

from .auto import AutoDrafter
from .base import Draft, Drafter, NoDrafter, Proposal
from .model import ModelDrafter, shared_vocabulary
from .mtp import MTPDrafter
from .ngram import NgramDrafter

__all__ = [
    "AutoDrafter",
    "Draft",
    "Drafter",
    "MTPDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "Proposal",
    "shared_vocabulary",
]
