#!/bin/bash
# Makes a certificate authority of your own, a certificate for collectors and one for agents:
#   deploy/tls/make_certificates.sh FOLDER NAME...
# NAMEs are those that agents use for the collector: host names or addresses. FOLDER gets
#   ca.pem                          both sides: whom to trust
#   collector.pem, collector.key    the collector
#   agent.pem, agent.key            agents, where the collector asks for certificates
#   ca.key                          to make more; keep it apart
# An existing authority in FOLDER is used again. DAYS=825 says how long certificates hold.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder=$1
shift
days=${DAYS:-825}
umask 077
mkdir -p "$folder"
cd "$folder"

names=()
for name in "$@"; do
    if [[ $name =~ ^[0-9.]+$ || $name == *:* ]]; then
        names+=("IP:$name")
    else
        names+=("DNS:$name")
    fi
done
alternatives=$(IFS=,; echo "${names[*]}")

new_key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$1"
}

# make NAME USAGE [FURTHER EXTENSION]: NAME.key and NAME.pem, signed by the authority.
make() {
    new_key "$1.key"
    printf '%s\n' "basicConstraints=CA:FALSE" "keyUsage=digitalSignature" \
        "extendedKeyUsage=$2" ${3:+"$3"} > "$1.ext"
    openssl req -new -key "$1.key" -subj "/O=rankscope/CN=rankscope $1" |
        openssl x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -days "$days" \
            -extfile "$1.ext" -out "$1.pem" 2> /dev/null
    rm "$1.ext"
}

if [ ! -e ca.key ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -days 3650 -subj "/O=rankscope/CN=rankscope authority" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.pem
fi
make collector serverAuth "subjectAltName=$alternatives"
make agent clientAuth
rm -f ca.srl
chmod 644 ./*.pem
echo "made in $PWD: certificates for $alternatives, valid for $days days"
