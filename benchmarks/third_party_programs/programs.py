"""All programs: where they are, how they are run with small data, and which faults their data get."""

from __future__ import annotations

from third_party_programs.others import BARE, GRAPHS, LANGUAGE, LEARNING, SEQUENCES
from third_party_programs.pictures import GENERATIVE, VISION

PROGRAMS = (*BARE, *LEARNING, *LANGUAGE, *GENERATIVE, *GRAPHS, *SEQUENCES, *VISION)
