#!/bin/sh
# Prints an .env for the compose files: a new password for each role of deploy/nats, and a token for
# the bridge. Nothing is kept anywhere else.
#
#   (umask 077; sh deploy/make-env.sh > deploy/.env)
set -eu
cd "$(dirname "$0")"

secret() { # 128 random bits; digits alone would be a number in nats-server's configuration
  printf p
  od -An -N16 -tx1 /dev/urandom | tr -d ' \n'
}

echo "# Made by deploy/make-env.sh. Secret: keep it out of the repository and of images."
for name in $(grep -oh '\$RUNFOLD_[A-Z]*_PASSWORD' nats/*.conf | tr -d '$' | sort -u); do
  echo "$name=$(secret)"
done
token=rf_$(secret)
sha256=$(printf %s "$token" | sha256sum | cut -d ' ' -f 1)
echo "# The token of whoever operates runs through a bridge; bridges know its hash alone."
echo "RUNFOLD_TOKEN=$token"
printf 'RUNFOLD_TOKENS={"tokens":[{"name":"ops","scopes":["read","signal"],"sha256":"%s"}]}\n' "$sha256"
