"""The engine for loops that we do not own: trainers, frameworks, and programs under ``nanguard run``.

``HostedLoop`` is for people who write an integration; ``HostedStep`` and ``StepCoordinator`` are what it is made of.
"""
