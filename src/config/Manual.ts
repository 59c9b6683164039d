// SPDX-License-Identifier: AGPL-3.0-or-later
/** The chapter of the manual that lists every option, made from their declarations. Pure. */
import * as Config from "./Config.ts"
import type * as Option from "./Option.ts"

/** Where the text belongs; it is written by a script and compared by a test. */
export const file = "docs/configuration.md"

/** What the manual says of a stage. */
export interface Program {
  readonly name: string
  readonly load: string | { readonly prefix: number }
  readonly effect: string
  readonly fusible: boolean
  readonly next: "required" | "none"
  readonly uses: ReadonlyArray<string>
  readonly settings: Option.Options
}

const introduction = `# Configuration

<!-- Generated from the declarations of the options; edit those. -->

The file is the one given with \`-c FILE\`; else \`$XDG_CONFIG_HOME/pepsi.conf\` or
\`$HOME/.config/pepsi.conf\`; else \`/etc/pepsi/pepsi.conf\`; else a built-in profile for trials.
A file stands alone: nothing of the profile is mixed in, but every option has its default.
\`pepsi config check\` finds every error, \`pepsi config show --diagnostics\` says where each value
comes from.

## Syntax

The syntax is that of GNUnet and GNU Taler:

- \`[section]\`, then \`OPTION = VALUE\`. Names compare without regard to case, values with it. A
  later assignment overrides an earlier one; a stage section may be continued in another file only.
- A line that begins with \`#\` or \`%\` is a comment. There are no comments behind a value.
- A value wholly in \`"\` keeps its outer blanks. There are no escapes.
- \`@inline@ FILE\` reads a file, \`@inline-matching@ GLOB\` all that match, in the order of their
  names. \`@inline-secret@ SECTION FILE\` reads that one section of a file which group and others
  may not read; if we may not either, that is a warning. Names are relative to the file they stand
  in.
- In file names \`$NAME\`, \`\${NAME}\` and \`\${NAME:-default}\` stand for an option of
  \`[PATHS]\`, else for a variable of the environment. \`$PEPSI_HOME\` is \`./pepsi-data\` if
  neither has it. What is still relative begins in the directory of the main file.
- A duration is \`30 s\`, \`5m\`, \`1 h 30 min\`, \`2 weeks\` or \`forever\`; \`m\` is minutes. A
  size is \`64K\`, \`10M\` or \`10 MiB\` (1024²), \`10 MB\` (1000²).
- An unknown option is an error; an unknown section is a warning unless its name begins with \`x-\`.
`

const escape = (text: string): string => text.replaceAll("|", "\\|").replaceAll("<", "&lt;")

const code = (text: string): string => `\`${text.replaceAll("|", "\\|")}\``

const row = ([name, option]: [string, Option.Option<unknown>]): string => {
  const shown = option.numbered === undefined ? name : `${name}_1 … ${name}_${option.numbered}`
  const usual =
    option.default === undefined ? "required" : option.default === "" ? "" : code(option.default)
  return `| ${code(shown)} | ${usual} | ${escape(option.doc)} | ${escape(option.type)} |`
}

const table = (options: Option.Options): ReadonlyArray<string> => [
  "| option | default | meaning | value |",
  "|---|---|---|---|",
  ...Object.entries(options).map(row),
  ""
]

const section = (name: string, options: Option.Options): ReadonlyArray<string> => [
  `## \`[${name}]\``,
  "",
  ...table(options)
]

const load = (level: Program["load"]): string =>
  typeof level === "string" ? level : `the first ${level.prefix} octets of the body`

const program = (stage: Program): ReadonlyArray<string> => {
  const services = stage.uses.map((use) => use.split("/").at(-1)!)
  return [
    `### ${stage.name}`,
    "",
    [
      `Loads ${load(stage.load)}`,
      `outside effect: ${stage.effect}`,
      stage.fusible ? "can run behind another stage" : "gets a worker of its own",
      stage.next === "required" ? "needs NEXT" : "takes no NEXT",
      services.length === 0 ? "asks no service" : `asks ${services.join(", ")}`
    ].join("; ") + ".",
    "",
    ...(Object.keys(stage.settings).length === 0 ? [] : table(stage.settings))
  ]
}

/** The default of PARALLELISM depends on the machine, so the manual says it in words. */
const stageOptions: Option.Options = {
  ...Config.stage(1),
  PARALLELISM: { ...Config.stage(1).PARALLELISM, default: "CPUs" }
}

/** The text of docs/configuration.md for these stages, in the order of their names. */
export const manual = (stages: ReadonlyArray<Program>): string =>
  [
    introduction,
    ...Object.entries(Config.sections).flatMap(([name, options]) => section(name, options)),
    ...section("stage-NAME", stageOptions),
    "A stage section has the options of its PROGRAM as well:",
    "",
    ...stages.toSorted((a, b) => (a.name < b.name ? -1 : 1)).flatMap(program)
  ]
    .join("\n")
    .trimEnd() + "\n"
