/* The command ``zerotop``: starts it in the Python beside this program, isolated (-I), so that variables and modules that the
   environment has for the job take no effect in zerotop itself. A script could not: its interpreter has started by then, and a
   shell changes the environment. */

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Where there is no Python beside it, as in ~/.local/bin: that of the folder where zerotop is installed. */
#define INSTALLED "%s/../lib*/python3*/*-packages/zerotop-*.dist-info"
#define ADD_FOLDER "import site, sys; site.addsitedir(sys.argv.pop(1)); from zerotop.cli import main; sys.exit(main())"

static int start(const char *python, char **options, int count, char **argv)
{
    int arguments = 0;
    while (argv[arguments])
        arguments++;
    char **command = calloc((size_t)(count + arguments + 2), sizeof *command);
    if (command) {
        command[0] = (char *)python;
        memcpy(command + 1, options, (size_t)count * sizeof *command);
        memcpy(command + 1 + count, argv + 1, (size_t)arguments * sizeof *command);
        execvp(python, command);
    }
    fprintf(stderr, "zerotop: cannot start %s: %s\n", python, strerror(errno));
    return 127;
}

int main(int argc, char **argv)
{
    /* Even an isolated Python looks at this one. zerotop gives it back to the job, see own_python. */
    const char *executable = getenv("PYTHONEXECUTABLE");
    if (executable && (setenv("PYTHONZEROTOP_EXECUTABLE", executable, 1) || unsetenv("PYTHONEXECUTABLE")))
        return 127;
    const char *name = (const char *)getauxval(AT_EXECFN);
    char folder[PATH_MAX], path[PATH_MAX + 64];
    if (argc < 1 || !name || !realpath(name, folder)) {
        fprintf(stderr, "zerotop: cannot find out where it is installed\n");
        return 127;
    }
    *strrchr(folder, '/') = 0;
    snprintf(path, sizeof path, "%s/python", folder);
    if (access(path, X_OK) == 0)
        return start(path, (char *[]){"-I", "-m", "zerotop"}, 3, argv);
    snprintf(path, sizeof path, INSTALLED, folder);
    glob_t found;
    if (glob(path, 0, NULL, &found) == 0) {
        char *packages = found.gl_pathv[found.gl_pathc - 1];
        *strrchr(packages, '/') = 0;
        snprintf(path, sizeof path, "%s", packages);
        *strrchr(path, '/') = 0;
        return start(strrchr(path, '/') + 1, (char *[]){"-I", "-c", ADD_FOLDER, packages}, 4, argv);
    }
    fprintf(stderr, "zerotop: there is neither a Python in %s nor zerotop in a lib folder beside it\n", folder);
    return 127;
}
