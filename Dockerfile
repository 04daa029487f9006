# syntax=docker/dockerfile:1
# medusa serve on a machine with an NVIDIA GPU: torch's wheels bring CUDA, the host brings the driver.
#   docker build -t medusa .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v medusa:/home/medusa medusa --base smollm2
FROM python:3.12-slim

# For kernels that are compiled at their first use: those for CPUs, and Triton's launchers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The home directory holds all caches: downloads, compiled kernels, measured steps.
RUN useradd --create-home --uid 1000 medusa
WORKDIR /app

# Without the code first (but the version), for a layer of gigabytes that lasts until the requirements change.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY medusa/__init__.py medusa/
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints.txt ".[serve,smollm2]"
COPY medusa medusa
COPY benchmarks benchmarks
COPY data data
COPY serve serve
COPY train train
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps .

USER 1000
WORKDIR /home/medusa
VOLUME /home/medusa
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["medusa", "serve", "--host", "0.0.0.0"]
CMD ["--base", "smollm2"]
