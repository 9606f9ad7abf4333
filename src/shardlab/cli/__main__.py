"""`python -m shardlab.cli`."""

from . import main

main()
