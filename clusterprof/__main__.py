"""`python -m clusterprof`, which does what `clusterprof` does."""

from clusterprof.cli import main

if __name__ == "__main__":
    main()
