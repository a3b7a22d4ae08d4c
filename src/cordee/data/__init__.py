"""The data layer: data sets by name or of the user's own, and loaders that cut them into batches."""

from cordee.data.ledger import Exchanges, Ledger, Unit
from cordee.data.load import BUILTIN_DATA, FILE_SOURCES, find_files, load_data
from cordee.data.loader import Loader
from cordee.data.online import GrowingSource, Place
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
