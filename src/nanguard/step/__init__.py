"""One guarded step: measure, agree, protect, judge, decide, act, record."""
