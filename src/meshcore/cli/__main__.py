"""``python -m meshcore.cli`` is the ``meshcore`` command."""

from meshcore.cli import main

if __name__ == "__main__":
    main()
