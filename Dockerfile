# A prediction server for a run folder that is mounted at /run-folder:
#   docker build -t credibly .
#   docker run -p 8000:8000 -v $PWD/run:/run-folder:ro -e CREDIBLY_TOKEN=... credibly
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# Options of pip, such as an index with wheels of torch for the CPU alone, which are a tenth of the size.
ARG PIP_OPTIONS=""
RUN pip install --no-cache-dir $PIP_OPTIONS -c constraints.txt ".[web]" \
 && rm -rf /src \
 && useradd --create-home server

USER server
WORKDIR /home/server
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
# The address is that of the container; what can reach it is decided by docker.
ENTRYPOINT ["credibly", "serve", "--host", "0.0.0.0"]
CMD ["/run-folder"]
