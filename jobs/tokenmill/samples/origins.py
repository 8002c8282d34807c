"""The documents and source files of samples of pairs."""

from collections.abc import Sequence

from tokenmill.core.buckets.mirror import show_addresses
from tokenmill.datasets.weighted import Pair
from tokenmill.engine.lineage import locate
from tokenmill.samples.sample_sources import Piece
from tokenmill.samples.samples import SampleOrigin


def locate_pieces(pairs: Sequence[Pair], pieces: Sequence[Piece]) -> list[SampleOrigin]:
    """Return the documents and source files of the pieces of a sample."""
    origins = []
    for piece in pieces:
        pair = pairs[piece.source]
        document = int(pair.reader.document_indices.searchsorted(piece.sequence, "right")) - 1
        file, record = None, None
        if place := locate(pair.parts, document):
            file, record = place
        text = pair.origin
        origins.append(
            SampleOrigin(
                path=show_addresses(pair.prefix),
                sequence=piece.sequence,
                offset=piece.offset,
                length=piece.length,
                document=document,
                file=file,
                record=record,
                uri=text.uri or None if text else None,
                revision=text.commit if text else None,
            )
        )
    return origins
