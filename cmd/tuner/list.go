package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
)

func listCommand() *cli.Command {
	return &cli.Command{
		Name:  "list",
		Usage: "list the studies in a root directory, newest first",
		Description: `Shows the state of each study and its best result. It never disturbs a study
that runs.

Examples:
  tuner list
  tuner list --root /mnt/nfs/studies -o json`,
		Flags: []cli.Flag{rootFlag(), formatFlag()},
		Action: onDisk(func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			if c.Args().Len() > 0 {
				return usage("list takes no argument; name the directory with --root")
			}
			if _, err := os.Stat(c.String("root")); err != nil && c.IsSet("root") { // the first run makes the default root
				return usage("--root (or TUNER_ROOT) %w; check the path, and that its disk is mounted", err)
			}
			list, err := listStudies(c.Context, c.String("root"))
			if err != nil {
				return err
			}
			return writeDocument(c.App.Writer, format, list, list.Text(render.Columns(c.App.Writer)))
		}),
	}
}

// listStudies reads the studies of a root directory. A study that cannot be read is an entry with an error.
func listStudies(ctx context.Context, root string) (*report.List, error) {
	names, err := studies.List(root)
	if err != nil {
		return nil, err
	}
	list := &report.List{Root: root, Studies: []report.Entry{}}
	for _, name := range names {
		dir := filepath.Join(root, name)
		study, err := studies.ReadLive(ctx, dir, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, studies.Unfinished) })
		entry := report.Entry{Name: name}
		if err != nil {
			entry.Error = render.Error(err)
		} else {
			entry = report.NewEntry(name, study, reportOptions(study))
			entry.OtherName = studies.OtherName(dir, study)
		}
		entry.Link, _ = os.Readlink(dir) // Link stays empty if the study's directory is not a symbolic link
		list.Studies = append(list.Studies, entry)
	}
	list.Sort()
	return list, nil
}
