"""Build an image with the first of docker, podman and buildah that works here: `make image`.

`build_image.py IMAGE CONTAINERFILE VERSION [FLAG...]`; flags go to the builder as they are.
"""

import shlex
import shutil
import subprocess
import sys

ARCHIVE = "tokenmill-image.tar"
# A docker that is installed but has no daemon answers its own version and fails to ask for the server's.
BUILDERS = {
    "docker": ("version", "kind load docker-image {image}"),
    "podman": ("info", "podman save -o {archive} {image} && kind load image-archive {archive}"),
    "buildah": ("info", "buildah push {image} docker-archive:{archive}:{image} && kind load image-archive {archive}"),
}


def main(image: str, containerfile: str, version: str, *flags: str) -> None:
    """Build it and say how it comes into a cluster."""
    builder = next((name for name, (probe, _) in BUILDERS.items() if works(name, probe)), None)
    if builder is None:
        sys.exit("make image needs docker (with its daemon), podman or buildah; none of them works here")
    command = [builder, "build", "-f", containerfile, "-t", image, "--build-arg", f"VERSION={version}", *flags, "."]
    print(shlex.join(command), flush=True)
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            f"{builder} could not build {image}; what it needs here goes into FLAGS=, another base into BASE_IMAGE="
        )
    load = BUILDERS[builder][1].format(image=image, archive=ARCHIVE)
    print(
        f"{builder} built {image}\nfor a kind cluster: {load}\nfor another cluster: push it, and set image.repository"
    )


def works(builder: str, probe: str) -> bool:
    """Say whether a builder is there and reaches what it works with."""
    found = shutil.which(builder)
    return bool(found) and subprocess.run([str(found), probe], check=False, capture_output=True).returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
