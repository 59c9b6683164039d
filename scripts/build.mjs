// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * Bundles the program into dist/. One entry; what it imports when it needs it (a stage, a mail
 * library, a command) is a chunk of its own, so that a worker starts in a few dozen milliseconds.
 */
import * as esbuild from "esbuild"
import { cpSync, mkdirSync, readdirSync, rmSync } from "node:fs"

process.chdir(new URL("../", import.meta.url).pathname)

const require =
  'import{createRequire as __cr}from"node:module";const require=__cr(import.meta.url);'
const result = await esbuild.build({
  entryPoints: ["src/main.ts"],
  outdir: "dist",
  bundle: true,
  splitting: true,
  platform: "node",
  format: "esm",
  target: "node24",
  sourcemap: true,
  outExtension: { ".js": ".mjs" },
  banner: { js: require },
  metafile: true,
  logLevel: "warning"
})
// Chunks of an earlier build; a program that still runs has loaded what it needs.
const made = new Set(
  Object.keys(result.metafile.outputs).map((name) => name.replace(/^dist\//, ""))
)
for (const name of readdirSync("dist")) {
  if (/\.mjs(\.map)?$/.test(name) && !made.has(name)) rmSync(`dist/${name}`)
}
mkdirSync("dist/migrations", { recursive: true })
cpSync("migrations", "dist/migrations", { recursive: true })
