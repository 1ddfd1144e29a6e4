"""Sentencepiece models as tokenizers of `tokenizers`, with the ids of sentencepiece.

One thing differs, as in transformers: a unigram model encodes the name of a control piece in a text as that piece.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"

# Numbers of sentencepiece's own format.
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def converted_model(path: Path, what: str) -> "tuple[Tokenizer, str]":
    """The tokenizer in a .model file, and its piece for the end of a document. Errors call the file `what`."""
    from tokenizers import AddedToken

    proto = _proto(path, what)
    kinds = {piece.piece: piece.type for piece in proto.pieces}
    if USER_DEFINED in kinds.values():
        raise ValueError(
            f"{what} has symbols that its user defined, for which only sentencepiece has the rules: "
            "name the folder or tokenizer.json that its makers offer for transformers"
        )
    end = proto.trainer_spec.eos_piece
    if kinds.get(end) != CONTROL:
        raise ValueError(f"{what} has no piece {end!r} that ends a document")
    tokenizer = _model(proto)
    special = [piece for piece, kind in kinds.items() if kind in (UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return tokenizer, end


def _proto(path: Path, what: str) -> Any:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ValueError(f"{what} needs: pip install sentencepiece protobuf") from error
    proto = getattr(sentencepiece_model_pb2, "ModelProto")()  # noqa: B009 - protobuf makes the class at import
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own, from a package that has no types
        raise ValueError(f"{what} is no sentencepiece model ({error}): fetch it again") from error
    if not proto.pieces or proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"{what} is no sentencepiece model of kind unigram or BPE")
    return proto


def _model(proto: Any) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == UNKNOWN)
    fallback = proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == BPE:
        name = proto.pieces[unknown].piece
        ids = {piece.piece: number for number, piece in enumerate(proto.pieces)}
        tokenizer = Tokenizer(models.BPE(ids, _merges(proto), unk_token=name, fuse_unk=True, byte_fallback=fallback))
    else:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        tokenizer = Tokenizer(models.Unigram(scores, unknown, fallback))
    spec = proto.normalizer_spec
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a third, best first.

    Sentencepiece joins the leftmost of equally good pairs, so that a run of spaces grows from the left. Preferring the
    longest result has the same effect.
    """
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == NORMAL}
    joined = [
        (-score, -len(piece), -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(joined)]
