"""Opens a model of any kind, headers only: GGUF, official directory, or expert pack with either.

Above this module nobody asks which kind it was, except the weight table that knows the names of
both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from edgedsv4.errors import ConfigError, FormatError, UnsupportedModelError
from edgedsv4.formats.expert_pack import ExpertPack, read_expert_pack
from edgedsv4.formats.expert_pack_header import is_pack
from edgedsv4.formats.expert_pack_manifest import MANIFEST_SUFFIX, check_manifest
from edgedsv4.formats.expert_pack_model import attach_experts, locate_dense, locate_pack
from edgedsv4.formats.faults import quoted
from edgedsv4.formats.gguf import GgufFile, read_gguf
from edgedsv4.formats.gguf_metadata import has_drafter
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.metadata import (
    TokenizerSpec,
    config_from_gguf,
    config_from_json,
    tokenizer_spec_from_gguf,
)
from edgedsv4.formats.safetensors import read_safetensors_index

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.tensor_record import TensorRecord

Kind = Literal["gguf", "official"]
EncodingHint = Literal["v4", "v4-0731"]

_GGUF_MAGIC: Final = b"GGUF"
_TEXT_LIMIT_BYTES: Final = 4 << 20
_SAMPLED_TENSORS: Final = 1024
_SAMPLE_BYTES: Final = 64
_LATER_RELEASES: Final = ("0731", "0813", "Beyond maximum")
_TEMPLATE_FILES: Final = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "encoding/encoding_dsv4.py",
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model; close it, or use it as a context manager."""

    path: Path
    """The file or directory that was asked for."""
    kind: Kind
    """Which names the tensors have: GGUF's, or the official ones."""
    config: ModelConfig
    tensors: Mapping[str, TensorRecord]
    """Tensors by their own names, in file order."""
    tokenizer: TokenizerSpec | Path | None
    """From GGUF metadata, the path of a `tokenizer.json`, or None."""
    name: str
    """What the file calls itself, else its own name."""
    warnings: tuple[str, ...]
    """What the user should know; nothing here keeps the model from running."""
    identity_sha256: str
    """Hex digest of headers, configuration and file sizes: the same for every copy of a model."""
    encoding_hint: EncodingHint
    """Prompt encoding that goes with the release, as far as the file tells."""
    files: tuple[MappedFile, ...]
    """The mappings that the tensors point into."""
    main: Checkpoint | None = None
    """The model alone, where an MTP block of another file was added to it."""
    pack: ExpertPack | None = None
    """The expert pack that holds the routed experts, where the model was opened by one."""
    dense_path: Path | None = None
    """The file or directory with everything else, beside a pack; None where it is `path`."""

    def weights_sha256(self) -> str:
        """Hex digest of samples of the tensor data, by which models of one form are told apart.

        Of at most 1,024 tensors the first and the middle 64 bytes are read: a few milliseconds from
        a warm file, and a page or two of each tensor from a cold one.
        """
        digest = hashlib.sha256()
        records = list(self.tensors.values())
        for record in records[:: 1 + len(records) // _SAMPLED_TENSORS]:
            for place in (0, record.nbytes // 2):
                count = min(_SAMPLE_BYTES, record.nbytes - place)
                digest.update(record.file.view(record.offset + place, count).data)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise `FormatError` if a file was modified, replaced or shortened since it was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Close every file; views already handed out stay valid until garbage collected."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(path: Path, *, dense: Path | None = None) -> Checkpoint:
    """Open a model without reading its tensor data.

    Args:
        path: a GGUF file (any part of a split set), a directory with `config.json` and safetensors
            files, or an expert pack or its manifest.
        dense: beside a pack, the file or directory with the rest of the model; None takes the one
            that the manifest names, or one beside the pack.

    Raises:
        FormatError: missing, damaged, of another format, or contradicting itself; a pack of another
            model than `dense`.
        UnsupportedModelError: another architecture, an MTP block or drafter by itself.
        ConfigError: `dense` is given, and `path` is no pack.
    """
    path = Path(path)
    try:
        return _open_kind(path, dense)
    except OSError as error:
        # A name that is too long, a directory that may not be entered.
        raise FormatError(f"cannot be opened: {error.strerror or error}", path=path) from error


def _open_kind(path: Path, dense: Path | None) -> Checkpoint:
    if _is_pack(path):
        return _open_pack(path, dense)
    if dense is not None:
        raise ConfigError(
            f"dense_model goes with an expert pack, but {path} is none; leave it out",
            name="dense_model",
        )
    return _open_whole(path)


def _is_pack(path: Path) -> bool:
    """Whether a path names an expert pack or a manifest."""
    if path.is_dir():
        return False
    if path.name.endswith(MANIFEST_SUFFIX):
        return True
    with MappedFile.open(path) as file:
        return is_pack(file.view(0, min(file.size, 64)).tobytes())


def _open_whole(path: Path) -> Checkpoint:
    """A model that is no pack."""
    if path.is_dir():
        return _open_directory(path)
    with MappedFile.open(path) as file:
        start = file.view(0, min(file.size, 64)).tobytes()
    if not start.startswith(_GGUF_MAGIC):
        _refuse(path, start)
    return _open_gguf(path)


def _open_pack(path: Path, dense: Path | None) -> Checkpoint:
    place, manifest = locate_pack(path)
    with ExitStack() as stack:
        pack = stack.enter_context(read_expert_pack(place))
        warnings = check_manifest(manifest, pack)
        rest = locate_dense(place, manifest) if dense is None else Path(dense)
        if _is_pack(rest):
            raise FormatError(
                "is an expert pack too; what goes with one is a GGUF file or an official directory",
                path=rest,
            )
        opened = stack.enter_context(_open_whole(rest))
        whole = attach_experts(opened, pack, manifest, path)
        stack.pop_all()
    return replace(whole, warnings=(*whole.warnings, *warnings))


def attach_draft(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Add the MTP block of a file of its own to a model that has none.

    llama.cpp numbers the block as the layer after the last and gives the block's own head mix the
    names that the main model's has elsewhere; those are listed as `blk.L.nextn.hc_head_*` here. ds4
    keeps `mtp.0.*`.

    Args:
        checkpoint: a GGUF model without an MTP block; use the result in its place and close
            only that.
        path: the file with the block.

    Raises:
        FormatError: no MTP block inside, or one for another number of layers.
        UnsupportedModelError: the model has a block already, or is an official directory.
    """
    if checkpoint.kind != "gguf" or checkpoint.config.num_draft_layers:
        raise UnsupportedModelError(
            "an MTP block can be added to a GGUF model that has none", path=checkpoint.path
        )
    with ExitStack() as stack:
        sidecar = read_gguf(Path(path))
        stack.callback(sidecar.close)
        block = checkpoint.config.num_layers
        added = _draft_tensors(sidecar, block)
        digest = hashlib.sha256(
            f"{checkpoint.identity_sha256}+{_identity(sidecar.files, sidecar.tensors)}".encode()
        )
        stack.pop_all()
    return replace(
        checkpoint,
        config=replace(checkpoint.config, num_draft_layers=1),
        tensors={**checkpoint.tensors, **added},
        identity_sha256=digest.hexdigest(),
        files=(*checkpoint.files, *sidecar.files),
        main=checkpoint,
    )


def _draft_tensors(sidecar: GgufFile, block: int) -> dict[str, TensorRecord]:
    heads = {
        f"output_hc_{leaf}{suffix}": f"blk.{block}.nextn.hc_head_{leaf}.weight"
        for leaf in ("fn", "base", "scale")
        for suffix in ("", ".weight")
    }
    kept = {
        heads.get(name, name): record
        for name, record in sidecar.tensors.items()
        if name in heads or name.startswith((f"blk.{block}.", "mtp.0."))
    }
    has_block = f"blk.{block}.nextn.eh_proj.weight" in kept or "mtp.0.e_proj.weight" in kept
    if not has_block or has_drafter(sidecar.tensors):
        raise FormatError(
            f"holds no MTP block for a model of {block} layers"
            f" (blk.{block}.nextn.eh_proj.weight or mtp.0.e_proj.weight)",
            path=sidecar.path,
        )
    return kept


def _open_gguf(path: Path) -> Checkpoint:
    with ExitStack() as stack:
        file = read_gguf(path)
        stack.callback(file.close)
        _refuse_draft_alone(file)
        config = config_from_gguf(file)
        tokenizer = tokenizer_spec_from_gguf(file, config.vocab_size)
        title = file.metadata.get("general.name")
        name = title if isinstance(title, str) and title else path.stem
        texts = [name, path.name, (tokenizer.chat_template if tokenizer else None) or ""]
        opened = Checkpoint(
            path=path,
            kind="gguf",
            config=config,
            tensors=file.tensors,
            tokenizer=tokenizer,
            name=name,
            warnings=(
                *file.warnings,
                *_tokenizer_warnings(tokenizer),
                *_draft_warnings(file.tensors, config),
            ),
            identity_sha256=_identity(file.files, file.tensors),
            encoding_hint=_encoding_hint(texts),
            files=file.files,
        )
        stack.pop_all()
    return opened


def _open_directory(path: Path) -> Checkpoint:
    settings = path / "config.json"
    if not settings.is_file():
        found = sorted(entry.name for entry in path.glob("*.gguf"))
        hint = f"; it holds {found[0]}: name that file" if found else ""
        what = f"a directory without config.json is not a checkpoint{hint}"
        raise FormatError(what, path=path, fault="missing")
    config = config_from_json(settings)
    with ExitStack() as stack:
        weights = read_safetensors_index(path)
        stack.callback(weights.close)
        is_drafter = config.num_draft_layers == 0 or has_drafter(weights.tensors)
        has_block = "mtp.0.e_proj.weight" in weights.tensors and not is_drafter
        config = replace(config, num_draft_layers=int(has_block))
        source = path / "tokenizer.json"
        tokenizer = source if source.is_file() else None
        texts = [path.resolve().name, *(_text(path / name) for name in _TEMPLATE_FILES)]
        opened = Checkpoint(
            path=path,
            kind="official",
            config=config,
            tensors=weights.tensors,
            tokenizer=tokenizer,
            name=path.resolve().name,
            warnings=(
                *weights.warnings,
                *_tokenizer_warnings(tokenizer),
                *_draft_warnings(weights.tensors, config),
            ),
            identity_sha256=_identity(weights.files, weights.tensors, settings.read_bytes()),
            encoding_hint=_encoding_hint(texts),
            files=weights.files,
        )
        stack.pop_all()
    return opened


def _refuse(path: Path, start: bytes) -> NoReturn:
    """Say what a file is that is neither GGUF nor a directory, as far as its first bytes tell."""
    if path.suffix == ".safetensors" or path.name in ("config.json", "tokenizer.json"):
        raise FormatError(
            "is one file of an official checkpoint; name its directory instead", path=path
        )
    raise FormatError(
        f"is not a model: expected a GGUF file (it starts with {quoted(start[:8])}) or a directory"
        " with config.json",
        path=path,
        offset=0,
    )


def _refuse_draft_alone(file: GgufFile) -> None:
    """An MTP block alone has a model's metadata; a clear word beats a thousand missing tensors."""
    is_draft = any(name.startswith("mtp.") or ".nextn.eh_proj" in name for name in file.tensors)
    if is_draft and not any(name.startswith("blk.0.attn_norm") for name in file.tensors):
        raise UnsupportedModelError(
            "holds only an MTP block (a draft for another file), not a model; open the main"
            " model's file",
            path=file.path,
        )


def _tokenizer_warnings(tokenizer: TokenizerSpec | Path | None) -> list[str]:
    if tokenizer is None:
        return ["no tokenizer inside: only token ids can be used"]
    if isinstance(tokenizer, TokenizerSpec) and not tokenizer.pre:
        return ["tokenizer.ggml.pre is missing: text is split as DeepSeek-V4 does"]
    return []


def _draft_warnings(tensors: Mapping[str, object], config: ModelConfig) -> list[str]:
    stages = {name.split(".")[1] for name in tensors if name.startswith("mtp.")}
    if not stages or config.num_draft_layers:
        return []
    if has_drafter(tensors):
        return [f"the DSpark drafter inside ({len(stages)} stages, mtp.*) is left out"]
    return ["the tensors mtp.* are no complete MTP block and are left out"]


def _encoding_hint(texts: Iterable[str]) -> EncodingHint:
    return "v4-0731" if any(mark in text for text in texts for mark in _LATER_RELEASES) else "v4"


def _text(path: Path) -> str:
    """A text file beside the weights, empty when it is absent, too large or unreadable."""
    try:
        if not path.is_file() or path.stat().st_size > _TEXT_LIMIT_BYTES:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _identity(
    files: Iterable[MappedFile], tensors: Mapping[str, TensorRecord], settings: bytes = b""
) -> str:
    """Digest of all header bytes and sizes; tensor data are not read."""
    first: dict[MappedFile, int] = {}
    for record in tensors.values():
        first[record.file] = min(record.offset, first.get(record.file, record.offset))
    digest = hashlib.sha256(settings)
    for file in files:
        header = first.get(file, file.size)
        digest.update(json.dumps([file.size, header]).encode())
        digest.update(file.view(0, header).data)
    return digest.hexdigest()
