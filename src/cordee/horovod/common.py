"""The names of `horovod.common` that scripts import: its modules for exceptions and process sets."""
