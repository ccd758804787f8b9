"""Everything that crosses ranks: collectives, the agreement of the ranks, and names for a profile."""
