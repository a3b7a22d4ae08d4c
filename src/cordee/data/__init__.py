"""The data layer: data sets by name or of the user's own, and loaders that cut them into batches."""

from cordee.data.builtin import BUILTIN_DATA, FILE_SOURCES, find_files
from cordee.data.growing import GrowingSource, Place
from cordee.data.ledger import Exchanges, Ledger, Unit
from cordee.data.load import load_data
from cordee.data.loader import Loader
from cordee.data.source import ArraySource, Scale, Source, Splits

__all__ = [
    "BUILTIN_DATA",
    "FILE_SOURCES",
    "ArraySource",
    "Exchanges",
    "GrowingSource",
    "Ledger",
    "Loader",
    "Place",
    "Scale",
    "Source",
    "Splits",
    "Unit",
    "find_files",
    "load_data",
]
