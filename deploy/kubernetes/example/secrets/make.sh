#!/bin/sh
# Makes this folder's secrets, once: a password for each NATS role, the addresses that hold them, and
# the bridge's tokens. Needs openssl and runfold. NATS_HOST says where NATS is.
#
#   nats-roles.env    for the servers (../../nats-values.yaml)
#   ROLE.env          for the pods of a role: RUNFOLD_STORE
#   tokens.json       who may use the bridge, by the hashes of tokens
#   *.token           the tokens themselves: prometheus (read), ops (signal)
set -eu
umask 077
cd "$(dirname "$0")"
host=${NATS_HOST:-nats.nats.svc.cluster.local:4222}
if [ -e nats-roles.env ]; then
    echo "$PWD/nats-roles.env is there: nothing was changed" >&2
    exit 1
fi
rm -f nats-roles.env.new tokens.json # of a try that failed
# Every role that roles.conf asks a password for.
for name in $(grep -o 'RUNFOLD_[A-Z]*_PASSWORD' ../../../nats/roles.conf | sort -u); do
    password="p$(openssl rand -hex 24)" # of digits alone nats-server would make a number
    echo "$name=$password" >> nats-roles.env.new
    role=$(echo "$name" | cut -d_ -f2 | tr '[:upper:]' '[:lower:]')
    case $role in worker | bridge | auditor | admin)
        echo "RUNFOLD_STORE=nats://$role:$password@$host" > "$role.env" ;;
    esac
done
token=$(runfold token prometheus --scope read --tokens tokens.json)
printf %s "$token" > prometheus.token # a header takes no line end
token=$(runfold token ops --scope signal --tokens tokens.json)
printf %s "$token" > ops.token
mv nats-roles.env.new nats-roles.env
