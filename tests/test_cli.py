import subprocess
import sys


def pdvi_command(*arguments):
    return subprocess.run([sys.executable, "-m", "pdvi", *arguments], capture_output=True, text=True, timeout=300)


def test_demo_prints_a_table():
    done = pdvi_command("demo", "--n", "500", "--epochs", "5")
    assert done.returncode == 0, done.stderr
    assert "P2D-VI" in done.stdout
    assert "PD-VI" in done.stdout


def test_info_names_versions():
    done = pdvi_command("info")
    assert done.returncode == 0
    assert "jax" in done.stdout


def test_bad_input_is_one_line_and_exit_code_1():
    done = pdvi_command("demo", "--n", "0")
    assert done.returncode == 1
    assert done.stderr == "pdvi: `n` must be at least 1, got 0.\n"
    assert "Traceback" in pdvi_command("--debug", "demo", "--n", "0").stderr
