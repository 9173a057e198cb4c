"""How fast decode attention over a quantised cache is, next to others and to the memory's read ceiling.

Nothing here is imported by the library itself.
"""
