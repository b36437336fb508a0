#!/bin/sh
# Makes an authority and certificates to try tls.conf with: not for production, where an authority
# of yours, or cert-manager, makes them and renews them.
#
#   make-certs.sh DIR [NAME...]    NAME: a host name or an address that servers are reached by
#
# Writes ca.pem, ca-key.pem, server.pem and server-key.pem into DIR, for all NAMEs together, beside
# localhost and 127.0.0.1; good for a server and, between nodes, a client. Overwrites nothing.
set -eu
umask 077

[ $# -ge 1 ] || { sed -n '5s/^# *//p' "$0" >&2; exit 2; }
dir=$1
shift
mkdir -p "$dir"
for file in ca.pem ca-key.pem server.pem server-key.pem; do
    [ ! -e "$dir/$file" ] || { echo "$dir/$file is there already" >&2; exit 1; }
done

names=DNS:localhost,IP:127.0.0.1
for name in "$@"; do
    case $name in
        *:*) kind=IP ;;
        *[!0-9.]*) kind=DNS ;;
        *) kind=IP ;;
    esac
    names=$names,$kind:$name
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"

cat >"$work/ca.cnf" <<EOF
[req]
distinguished_name = name
x509_extensions = ca
prompt = no
[name]
CN = Runfold throwaway authority
[ca]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
EOF
cat >"$work/server.cnf" <<EOF
[req]
distinguished_name = name
prompt = no
[name]
CN = nats-server
[server]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth,clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = $names
EOF

# shellcheck disable=SC2086  # $key is several words
openssl req -x509 -days 365 $key -config "$work/ca.cnf" \
    -keyout "$dir/ca-key.pem" -out "$dir/ca.pem" 2>/dev/null
# shellcheck disable=SC2086
openssl req $key -config "$work/server.cnf" \
    -keyout "$dir/server-key.pem" -out "$work/server.csr" 2>/dev/null
openssl x509 -req -days 365 -in "$work/server.csr" -CA "$dir/ca.pem" -CAkey "$dir/ca-key.pem" \
    -CAcreateserial -CAserial "$work/serial" -extfile "$work/server.cnf" -extensions server \
    -out "$dir/server.pem" 2>/dev/null
chmod 644 "$dir/ca.pem" "$dir/server.pem"
openssl verify -CAfile "$dir/ca.pem" "$dir/server.pem"
