"""Graph passes: each a function Graph -> Graph that returns its argument when it changed nothing."""
