# Defines the function private_apt, which bash scripts use to extract packages without installing them. It uses its own package sources, whose signatures are
# checked, and does not change the system's apt. $target must be a working directory.
mirror=$(sed -n 's/^URIs: *\([^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null | head -1)
[ -n "$mirror" ] || mirror=$(sed -n 's/^deb \(\[[^]]*\] \)\?\([^ ]*\) bookworm main.*/\2/p' /etc/apt/sources.list 2>/dev/null | head -1)
if [ -z "$mirror" ]; then
  echo "error: /etc/apt names no mirror with Debian bookworm; add one to /etc/apt/sources.list, then run this again" >&2
  exit 1
fi
key=/usr/share/keyrings/debian-archive-keyring.gpg

# Makes apt-get use a private configuration with the given sources from now on.
private_apt() { # name, lines of sources.list
  local apt=$target/apt-$1
  mkdir -p "$apt"/etc/{sources.list.d,preferences.d,apt.conf.d,trusted.gpg.d} "$apt"/state/lists/partial "$apt"/cache/archives/partial
  : > "$apt/status"
  cat > "$apt/apt.conf" <<END
Dir::Etc "$apt/etc";
Dir::Etc::sourcelist "$apt/etc/sources.list";
Dir::Etc::sourceparts "$apt/etc/sources.list.d";
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Acquire::Languages "none";
Acquire::Retries "3";
APT::Sandbox::User "root";
END
  printf '%s\n' "$2" > "$apt/etc/sources.list"
  export APT_CONFIG=$apt/apt.conf
  apt-get -q update >/dev/null
}
