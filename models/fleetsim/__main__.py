"""`python -m models.fleetsim` compiles the plant, so that nobody has to wait for it later."""

from models.fleetsim.ready import compile_all

if __name__ == "__main__":
    compile_all()
