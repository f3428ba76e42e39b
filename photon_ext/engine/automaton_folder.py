"""Compiled automata in a folder, for engines that come later."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from photon_ext.errors import ConfigError, shown
from photon_ext.sampling.automaton_file import FORMAT, automaton_bytes, read_automaton
from photon_ext.sampling.byte_automaton import AutomatonLimits
from photon_ext.sampling.grammar import Grammar
from photon_ext.sampling.token_automaton import TokenAutomaton, TokenBytes

MOST_BYTES = 256 * 2**20  # of all files; the least recently used go first
_BEGIN, _SUFFIX, _UNFINISHED = "photon-", ".automaton", ".unfinished"
_OWN = re.compile(rf"[0-9a-f]{{64}}\{_SUFFIX}|{_BEGIN}.*\{_UNFINISHED}")  # names of our files
_LOG = logging.getLogger("photon_ext")


class AutomatonFolder:
    """A file for each automaton, named by a hash of all that it follows from: the form, the
    tokenizer, llguidance's version and that of what is written. Threads and processes may share the
    folder: a file is there as a whole or not at all. What is damaged counts as missing, and what
    cannot be written is compiled again the next time. Files are checked for damage, not for what
    somebody has forged: let nobody write there whom you do not trust.
    """

    def __init__(self, folder: Path, tokenizer: str, most_bytes: int = MOST_BYTES) -> None:
        """`tokenizer`: all that tells its vocabulary, and what ends an answer, from others."""
        self._folder = folder
        self._most_bytes = most_bytes
        parts = str(FORMAT), metadata.version("llguidance"), tokenizer
        self._salt = hashlib.sha256("\0".join(parts).encode()).digest()

    def load(
        self, grammar: Grammar, vocabulary: TokenBytes, limits: AutomatonLimits
    ) -> TokenAutomaton | None:
        """The automaton of a form; None: it is not there. Raises NotRegular: it takes more than the
        limits allow.
        """
        key = self._key(grammar)
        file = self._file(key)
        try:
            automaton = read_automaton(self._read(file), key, vocabulary, limits)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _LOG.warning("%s is not used, and will be written anew: %s", file, error)
            return None
        with suppress(OSError):  # removed meanwhile, or another user's
            os.utime(file)
        return automaton

    def save(self, grammar: Grammar, automaton: TokenAutomaton) -> None:
        """Writes the automaton of a form."""
        key = self._key(grammar)
        try:
            self._write(self._file(key), automaton_bytes(automaton, key))
        except OSError as error:
            _LOG.warning("an automaton is not kept in %s: %s", self._folder, error)
        with suppress(OSError):
            self._trim()

    def _key(self, grammar: Grammar) -> bytes:
        return hashlib.sha256(self._salt + grammar.key).digest()

    def _file(self, key: bytes) -> Path:
        return self._folder / (key.hex() + _SUFFIX)

    def _read(self, file: Path) -> bytes:
        """Raises OSError, or ValueError: it is something else, as a FIFO, where one would wait."""
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > self._most_bytes:
            raise ValueError(f"it is no regular file of up to {self._most_bytes} bytes")
        return file.read_bytes()

    def _write(self, file: Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(_UNFINISHED, _BEGIN, self._folder)
        try:
            with os.fdopen(handle, "wb") as unfinished:
                os.fchmod(handle, 0o644)  # other users may read it
                unfinished.write(data)
            os.replace(name, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _trim(self) -> None:
        """Removes the least recently used files, and what a process that died has left."""
        found = []
        for file in self._folder.iterdir():
            if _OWN.fullmatch(file.name):
                with suppress(OSError):  # removed by another process, or a link to itself
                    status = file.stat()
                    found.append((status.st_mtime, status.st_size, file))
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self._most_bytes:
                return
            with suppress(OSError):  # another user's
                file.unlink(missing_ok=True)
                total -= size


def made_folder(path: object) -> Path:
    """A folder that can be written into, made if it is missing. Raises ConfigError."""
    if isinstance(path, str) and not path:
        raise ConfigError("automata_dir is '', expected a folder's path; '.' is the current one")
    try:
        folder = Path(path).resolve()  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"automata_dir is {shown(path)}, which is no folder ({error}); give one that is there, "
            "or can be made"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"automata_dir {shown(path)} cannot be written into; give another")
    return folder
