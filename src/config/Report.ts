// SPDX-License-Identifier: AGPL-3.0-or-later
/** What `pepsi config show` and `pepsi config check` print, line by line. Pure. */
import * as Ini from "./Ini.ts"
import type { Diagnostic } from "./Decode.ts"

/** The part of a configuration that is shown. */
export interface Shown {
  readonly diagnostics: ReadonlyArray<Diagnostic>
  readonly warnings: ReadonlyArray<string>
  readonly generation: string
  readonly ingress: { readonly DB_POOL_SIZE: number }
  readonly dispatch: { readonly DB_POOL_SIZE: number }
  readonly pipeline: {
    readonly entries: ReadonlyArray<string>
    readonly sections: ReadonlyMap<string, { readonly parallelism: number }>
  }
}

/**
 * A file that means what this configuration means, wherever it is put: defaults written out, file
 * names expanded, secrets left to comments.
 */
export const show = ({ diagnostics }: Shown): ReadonlyArray<string> =>
  Array.from(Map.groupBy(diagnostics, ({ section }) => section)).flatMap(([section, values], i) => [
    ...(i === 0 ? [] : [""]),
    `[${section}]`,
    ...values.map(({ option, secret, value }) =>
      secret ? `# ${option} is never shown` : Ini.printAssignment(option, value)
    )
  ])

/** Each value in force with where it was written. */
export const diagnose = ({ diagnostics }: Shown): ReadonlyArray<string> =>
  diagnostics.map(({ option, origin, secret, section, value }) => {
    const where = origin === undefined ? "default" : Ini.at(origin)
    return `${where}: [${section}] ${option}${secret ? " is a secret" : ` = ${value}`}`
  })

/**
 * One value, as it is written or (`expanded`) as a file name; undefined = there is no such option.
 * A secret is the empty text.
 */
export const value = (
  { diagnostics }: Shown,
  {
    expanded,
    option,
    section
  }: {
    readonly section: string
    readonly option: string
    readonly expanded: boolean
  }
): string | undefined => {
  const found = diagnostics.find(
    (one) => one.section === section.toLowerCase() && one.option === option.toUpperCase()
  )
  return found === undefined ? undefined : expanded ? found.value : found.written
}

/** Warnings, then what the wiring amounts to. Errors are what reading it fails with. */
export const check = (configuration: Shown): ReadonlyArray<string> => {
  const { dispatch, ingress, pipeline } = configuration
  const sections = Array.from(pipeline.sections.values())
  const workers = sections.reduce((sum, { parallelism }) => sum + parallelism, 0)
  const pools = ingress.DB_POOL_SIZE + dispatch.DB_POOL_SIZE
  return [
    ...configuration.warnings.map((warning) => `warning: ${warning}`),
    `${sections.length} stage ${sections.length === 1 ? "section" : "sections"}, mail enters at ${pipeline.entries.join(", ")}`,
    `at most ${workers + pools} database connections: ${workers} of workers, ` +
      `${dispatch.DB_POOL_SIZE} of the dispatcher, ${ingress.DB_POOL_SIZE} of the SMTP server`,
    `generation ${configuration.generation}`
  ]
}
