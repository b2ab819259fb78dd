"""The messages of the wire, as msgspec structs, and the Arrow schema. Imports nothing of the other rooms."""
