"""Many answers with their rows, in a folder that a kill at any moment leaves whole.

A capture's folder holds:

- ``shard-00000.arrow`` and so on, or ``.parquet``: the wire's columns behind ``id``. All rows of an answer
  are in one shard, one behind another. A shard gets its name when it is on the disk.
- ``manifest.jsonl``: the settings, then one line per shard, written after the shard itself: what it holds,
  and its checksum. Only what stands here counts, so an answer is there once and whole, or not at all.
- ``failures.jsonl``: one line per prompt that the server refused or failed.
- ``lock``: held by the capture that runs.
"""

from logitwire.capture.reading import Capture, check_capture, open_capture
from logitwire.capture.records import CaptureError

__all__ = ["Capture", "CaptureError", "check_capture", "open_capture"]
