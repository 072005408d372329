# A prediction server for a run folder that is mounted at /run-folder:
#   docker build -t credibly .
#   docker run -p 8000:8000 -v $PWD/run:/run-folder:ro -e CREDIBLY_TOKEN=... credibly
FROM python:3.12-slim AS build

RUN apt-get update && apt-get install -y --no-install-recommends g++
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
# All instruction sets: the image may run on another processor. Fails without a compiled library.
RUN CREDIBLY_VARIANTS=all pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && python -m zipfile -l /wheels/credibly-*.whl | grep -q "backends/cpp/compiled/.*\.so"

FROM python:3.12-slim

COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# Options of pip, such as an index with wheels of torch for the CPU alone, which are a tenth of the size.
ARG PIP_OPTIONS=""
RUN pip install --no-cache-dir $PIP_OPTIONS -c /wheels/constraints.txt "$(ls /wheels/credibly-*.whl)[web]" \
 && useradd --create-home server

USER server
WORKDIR /home/server
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
# The address is that of the container; what can reach it is decided by docker.
ENTRYPOINT ["credibly", "serve", "--host", "0.0.0.0"]
CMD ["/run-folder"]
